"""Answers that are equal however they are put together, and their neighbours that are not; class by class."""

import pytest

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.answers import quick_verdict
from bapo_jax.tasks.mathematics.worker import slow_verdict

EQUAL = {
    'labels': [
        ('16,3,1,1', 'w=16, d=3, a=1, b=1'), ('d=3, w=16, b=1, a=1', 'w=16, d=3, a=1, b=1'), ('x=1, y=2', '(x,y)=(1,2)'),
        ('(1,2)', 'x=1, y=2'), ('a=3,b=-1', r'a=3 \text{ and } b=-1'), (r'x=2 \text{ or } x=3', '2,3'),
        ('y=2, x=1', 'x=1, y=2'), (r'p=\frac12, q=3', '0.5, 3'), ('3, 5', 'm = 3, n = 5'), ('(a,b,c)=(1,2,3)', 'a=1,b=2,c=3'),
        ('(w,d,a,b)=(16,3,1,1)', 'w=16, d=3, a=1, b=1'), (r'a=1,\quad b=2,\quad c=3', '(1,2,3)'),
        (r'x=3\text{ and }y=4', 'x=3, y=4'), ('(x, y, z) = (1, 2, 3)', 'x=1,y=2,z=3'),
        (r'A=\frac{1}{2}, B=-\frac{1}{2}', r'(A,B)=\left(\frac12,-\frac12\right)'), ('x_1 = 1, x_2 = -3', '1,-3'),
        ('x_1=1,x_2=-3', 'x_{1}=1, x_{2}=-3'), ('f(n)=n, g(n)=1', '$f(n)=n$, $g(n)=1$'),
    ],
    'subscripts': [
        ('5', r'a_{\text{max}} = 5'), ('12', r'\text{Area}_{ABC}=12'), (r'V_{\max}=\frac{4}{3}\pi', r'\frac{4\pi}{3}'),
        (r'm\angle ABC = 30^\circ', '30'), (r'P_{\text{total}}=40', '40'), (r'n_{\min}=7', '7'),
        (r'\angle ABC=45^\circ', '45'), (r'\triangle = 5', '5'), (r'\overline{AB}=5', '5'), (r'\mathrm{lcm}(4,6)=12', '12'),
        (r'\lim_{n\to\infty} a_n = 3', '3'), (r'\tan\alpha = \frac{3}{4}', r'\frac34'),
        (r'S=\{1,2\}', r'\{1,2\}'), ('D=(0,1)', '(0,1)'), (r'k=\boxed{5}', '5'),
    ],
    'sets': [
        (r'(3,\infty)', r'\{x \mid x > 3\}'), ('x>3', r'\{x : x>3\}'),
        (r'\mathbb{R}\setminus\{2\}', r'(-\infty,2)\cup(2,\infty)'), (r'\{x\mid x\neq 2\}', r'(-\infty,2)\cup(2,\infty)'),
        (r'\{k\in\mathbb{Z}: k \geq 5\}', r'\{n \in \mathbb{Z} \mid n\ge 5\}'),
        (r'(-\infty, -1) \cup (-1, \infty)', r'\{x \mid x \neq -1\}'),
        (r'\{x \in \mathbb{R} : x^2 = 4\}', r'\{x \in \mathbb{R} \mid x^2=4\}'), (r'\{x: -2<x<2\}', '(-2,2)'),
        (r'x \in [-2, 7]', r'\{x \mid -2 \le x \le 7\}'), (r'\{y \mid y \ge 0\}', r'[0,\infty)'),
        (r'[0,+\infty)', r'y\geq 0'), (r'\{a : a > 2 \text{ or } a < -2\}', r'(-\infty,-2)\cup(2,\infty)'),
        (r'\mathbb{R}', r'(-\infty,\infty)'), (r'\text{all real numbers}', r'\mathbb{R}'),
        (r'\{2,4,6\}', r'\{x \mid x = 2,4,6\}'), (r'\{(x,y) \mid y=2x\}', r'\{(x,y): y = 2x\}'),
        (r'\varnothing', r'\emptyset'), (r'\{\}', r'\varnothing'),
    ],
    'both_signs': [
        ('(1,2),(-1,2)', r'(\pm 1, 2)'), (r'(\pm 1,2)', '(1,2), (-1,2)'), (r'1+\sqrt2, 1-\sqrt2', r'1 \pm \sqrt{2}'),
        (r'\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}', r'\frac{1\pm\sqrt5}{2}'), ('0, 2, -2', r'0, \pm 2'), (r'x=\pm 3', '3,-3'),
        (r'\pm 1, \pm 2', '1,-1,2,-2'), ('(0,1),(0,-1),(2,3)', r'(0,\pm 1),(2,3)'),
        (r'(2,\pm 1)', r'(2,1) \text{ and } (2,-1)'), (r'(\pm\sqrt{2},0)', r'(\sqrt2,0),(-\sqrt2,0)'),
        (r'x=1\pm\sqrt{3}', r'1-\sqrt3,1+\sqrt3'), (r'\pm\frac{1}{2}', r'-\frac12,\frac12'),
        (r'x=\frac{-b\pm\sqrt{b^2-4ac}}{2a}', r'\frac{-b\pm\sqrt{b^2-4ac}}{2a}'),
        (r'\{1+\sqrt5, 1-\sqrt5, -2\}', r'\{1\pm\sqrt{5},-2\}'), (r'(\pm 3, \pm 2)', '(3,2),(-3,2),(3,-2),(-3,-2)'),
        (r'\pm i', 'i,-i'), (r'z = \pm 2i', '2i, -2i'), (r'2k\pi\pm\frac{\pi}{3}', r'2k\pi+\frac\pi3,2k\pi-\frac\pi3'),
    ],
    'intervals': [
        (r'1<x\le 3', '(1,3]'), (r'3 \ge x > 1', '(1,3]'), (r'a\in[2,\infty)', r'a \ge 2'),
        (r'x \leq -2 \text{ or } x \geq 2', r'(-\infty,-2]\cup[2,+\infty)'),
        (r'(-\infty, 1) \text{ and } (3,\infty)', r'(-\infty,1)\cup(3,\infty)'), ('a > 1', '1<a'), ('0<m<4', r'm \in (0,4)'),
        (r'x \in (-\infty, 1) \cup (3, \infty)', r'x<1 \text{ or } x>3'), (r'x<1\text{ or }x>3', r'x>3 \text{ or } x<1'),
        (r'-1\leq x<2', '[-1,2)'), ('x>-1', r'(-1,+\infty)'), (r'-\frac{1}{2} < k < 0', r'\left(-\frac12,0\right)'),
        (r'x\geq 2 \text{ and } x\leq 5', '[2,5]'), (r'x \in [1,2] \cup [3,4]', r'1\le x\le2 \text{ or } 3\le x\le4'),
        (r'm < -2 \lor m > 6', r'(-\infty,-2)\cup(6,\infty)'), (r'\theta \in [0, \pi)', r'0\le\theta<\pi'),
        (r'\left(-\infty, \frac{1}{2}\right]', r'x \le 0.5'), (r'p \geq \frac{3}{4}', r'[0.75,\infty)'),
    ],
    'qualifiers': [
        ('f(x)=2x', r'f(x)=2x \text{ for all } x'), (r'f(x)=x+1 \text{ for all real } x', 'f(x)=x+1'),
        (r'n\pi', r'n\pi, n\in\mathbb{Z}'), (r'f(n)=n+1, \forall n \in \mathbb{N}', 'f(n)=n+1'),
        (r'f(x) = cx \text{ for some constant } c', 'f(x)=cx'), (r'y=2x+C, \text{ where } C \text{ is a constant}', 'y=2x+C'),
        (r'3 \text{ if } n \text{ is odd}', r'3 \text{ if } n \text{ is odd}'),
        (r'f(x)=c \text{ for any constant } c', 'f(x)=c'), (r'a_n = 2^n - 1 \text{ for all } n \geq 1', '2^n-1'),
        (r'x = 2\pi k, k \in \mathbb{Z}', r'2\pi k'),
        (r'x=\frac{\pi}{2}+n\pi \text{ for any integer } n', r'\frac{\pi}{2}+n\pi'),
        (r'x = \frac{\pi}{2} + k\pi, \quad k \in \mathbb{Z}', r'x=\frac{\pi}{2}+n\pi, n\in\mathbb{Z}'),
        (r'f(x)=ax+b, \text{ where } a,b\in\mathbb{R}', 'f(x)=ax+b'), (r'(n,n+1) \text{ for } n\in\mathbb{N}', '(n,n+1)'),
        (r'y=x+C \quad (C \in \mathbb{R})', 'y=x+C'),
        (r'\frac{n(n+1)}{2}\text{ for every positive integer }n', r'\frac{n(n+1)}{2}'),
        (r'a_n=3n-2 \ (n \in \mathbb{N}^*)', 'a_n=3n-2'), (r'k \text{ where } k=5', 'k'),
    ],
    'choices': [
        (r'\textbf{(D)} 12', '12'), (r'\textbf{(D)}\ 12', 'D'), (r'\text{(B) }\frac{1}{2}', r'\frac12'),
        (r'\mathrm{(E)}~\pi', r'\pi'),
    ],
    'latex': [
        (r'\frac2\pi', r'\frac{2}{\pi}'), (r'\big(\tfrac12\big)^n', r'\left(\frac12\right)^n'),
        (r'\frac1{\sqrt2}', r'\frac{\sqrt2}{2}'), (r'\frac x2', r'\frac{x}{2}'), (r'\frac{\sqrt 3}2', r'\frac{\sqrt3}{2}'),
        (r'\sqrt\frac12', r'\frac{1}{\sqrt2}'), (r'\frac{3}4', '0.75'), (r'-\frac\pi3', r'-\frac{\pi}{3}'),
        (r'\frac{\pi}{2}\,', r'\pi/2'), (r'\frac ab', r'\frac{a}{b}'), (r'\frac{\sqrt2}2', r'\frac{1}{\sqrt{2}}'),
        (r'\Big\lfloor \frac n2 \Big\rfloor', r'\lfloor \frac{n}{2} \rfloor'), (r'\frac{x+1}y', r'\frac{x+1}{y}'),
        (r'3\!\cdot\!2^5', '96'), (r'\mathbf{5}', '5'), ('{5}', '5'), (r'\left\{1,2\right\}', r'\{2,1\}'),
        (r'\frac{\frac12}{3}', r'\frac16'),
    ],
    'degrees': [
        (r'45^\circ', r'\frac{\pi}{4}'), (r'\frac{\pi}{6}', r'30^\circ'), (r'60^{\circ}', r'\frac{\pi}{3} \text{ radians}'),
        (r'90^\circ', '90'), (r'30^\circ, 60^\circ', r'\frac{\pi}{6},\frac{\pi}{3}'), (r'22.5^\circ', r'\pi/8'),
        (r'90 \text{ degrees}', r'90^\circ'), (r'90 \text{ degrees}', r'\pi/2'),
        (r'\frac{\pi}{2} \text{ rad}', r'\frac{\pi}{2}'), (r'\frac{\pi}{3}', r'60^{\circ}'),
        (r'(45^\circ,60^\circ)', r'(\frac{\pi}{4},\frac{\pi}{3})'), (r'120^\circ', r'\frac{2\pi}{3}'),
        (r'\tan 60^\circ', r'\sqrt3'), (r'0^\circ', '0'), (r'360^\circ', r'2\pi'), ('45 degrees', r'45^\circ'),
        (r'45\degree', '45'), (r'\angle A=45\degree', '45'),
    ],
    'bound': [
        (r'k\pi, k\in\mathbb{Z}', r'n\pi'), (r'\frac{\pi}{2}+n\pi', r'\frac{\pi}{2}+k\pi, k\in\mathbb{Z}'),
        ('f(t)=2t+1', 'f(x)=2x+1'), (r'\sum_{k=1}^n k^2', r'\sum_{i=1}^n i^2'),
        (r'k\pi, k\in\mathbb{Z}', r'n\pi, n\in\mathbb{Z}'), (r'2m+1, m \in \mathbb{Z}', r'2k+1, k\in\mathbb{Z}'),
        (r'\int_0^1 t^2 dt', r'\int_0^1 x^2 dx'), ('f(t)=t^2', 'f(x)=x^2'), ('g(y)=y-1', 'g(x)=x-1'),
        (r'\frac{\pi}{4}+k\pi \ (k\in\mathbb{Z})', r'\frac{\pi}{4}+n\pi, n \in \mathbb{Z}'), (r'(-\infty,2)', r'\{t:t<2\}'),
    ],
    'units': [
        ('5th', '5'), (r'5^{\text{th}}', '5'), ('21^{st}', '21'), ('3rd', r'3^{\text{rd}}'), (r'100\text{th}', '100'),
        (r'5 \text{ cm}', r'5 \text{ centimeters}'), ('3 dozen', '36'),
        (r'8\sqrt{3}\text{ square inches}', r'8\sqrt3\text{ in}^2'), (r'60\text{ km/h}', r'60\text{ kilometers per hour}'),
        (r'9.8\ \mathrm{m/s^2}', '9.8'), (r'2\text{ feet}', '2 ft'), (r'1.2\text{ billion}', '1,200,000,000'),
        (r'3\text{rd}', '3'), (r'\text{5th}', '5'), (r'\text{5 cm}', '5'), (r'x = 5 \text{ cm}', '5'),
        (r'\frac{1}{2} \text{ hour}', '1/2'), (r'864\text{ in}^2', r'864 \mbox{ inches}^2'),
    ],
    'equations': [
        ('x=5', '5'), ('5', 'x=5'), ('2+3=5', '5'), ('x=2+3=5', '5'), (r'\binom52=10', '10'), ('f(2)=5', '5'),
        (r'\text{Area}=12', '12'), (r'\cos\theta=\frac35', r'\frac35'), ('|z|=5', '5'),
        (r'\int_0^1 2x dx = 1', '1'), ('5=x', '5'), (r'\frac{S_1}{S_2}=\frac12', '1/2'), ('x^2+y^2=25', 'x^2+y^2-25=0'),
        ('2+3', 'x=5'),
    ],
    'exact': [
        ('100!', r'100\cdot 99!'), (r'\frac{2^{100}-1}{2^{100}}', '1-2^{-100}'),
        (r'\sin(15^\circ)', r'\frac{\sqrt6-\sqrt2}{4}'), (r'\log_2 8', '3'), (r'e^{i\pi}', '-1'),
        (r'\frac{1}{2^{100}}', '2^{-100}'), (r'\binom{100}{50}', r'\frac{100!}{50!50!}'), ('2^{1/3}', r'\sqrt[3]{2}'),
        (r'2023\cdot 2^{2024}+2', r'2(2023\cdot 2^{2023}+1)'), ('y=2x+3', '2x-y+3=0'), ('4x-6y=2', 'y=(2x-1)/3'),
        ('(x-1)^2+(y+2)^2=9', 'x^2+y^2-2x+4y-4=0'), ('10^{100}, 10^{0.01}', '$10^{100}$,$10^{1 / 100}$'),
        ('2^{100}-1', '1267650600228229401496703205375'), ('A', r'\text{A}'), (r'x\le5', r'5\ge x'), ('6!', '720'),
        (r'\frac{3^{2024}-1}{2}', r'\frac{-1+3^{2024}}{2}'),
    ],
}  # fmt: skip
UNEQUAL = {
    'exact': [
        ('2^{2024}+1', '2^{2024}-1'), ('100!', '100!-1'), ('2^{100}', '2^{100}+1'), ('3^{200}', '3^{200}-1'),
        (r'\frac{1}{2^{100}}', r'\frac{1}{2^{100}+1}'), (r'\sqrt{10^{40}+1}', '10^{20}'), ('10^{10^{10}}+1', '10^{10^{10}}'),
        ('2^{2024}+2', '2^{2024}+2^2'), (r'\{2^{200}+1\}', r'\{2^{200}\}'), ('(1+10^{-20})x', 'x'), ('0.1+10^{-20}', '0.1'),
        ('2^{100}x=1', '(2^{100}+1)x=1'), ('x^2+y^2=10^{30}+1', 'x^2+y^2=10^{30}'),
        (r'\sin(10^{-20})', '0'), (r'\sin(10^{-20})', '10^{-20}'), ('2^{2024}-2^{2023}+1', '2^{2023}'),
        (r'\left(\frac12\right)^{100}', '0'), ('1.00000000000000000001', '1'), (r'\ln(2^{100}+1)', r'\ln(2^{100})'),
        ('100000000000000000000', '100000000000000000001'), (r'\frac{2^{64}}{2^{64}-1}', '1'), ('50!', '50!+50'),
        (r'\frac{1}{1-2^{-200}}', '1'), ('7^{7^{7}}', '7^{7^{7}}+1'),
    ],
    'units': [
        (r'10 \text{ a.m.}', r'10\text{ p.m.}'), ('10 am', '10 pm'), ('3 million', '3'),
        (r'3 \text{ or fewer}', r'3\text{ or more}'), ('at least 3', '3'), (r'30^\circ,60^\circ', '30,61'),
        ('12 cm^2', '12 cm^3'), (r'5^{\text{th}}', r'4^{\text{th}}'), (r'5\text{ cm}, 3\text{ cm}', '5 cm, 3 m'),
        ('5 hours', '5 minutes'), ('5 dozen', '5'), (r'\text{at most }3', r'\text{at least }3'),
        (r'3 \text{ or less}', r'3\text{ or more}'), ('3:00 p.m.', '3:00 a.m.'), (r'\$3', r'\$4'),
        (r'5\text{ mm}^2', r'5\text{ cm}^2'), ('5 square meters', '5 cubic meters'), ('10 is wrong, 12', '10'),
        ('5 is not the answer', '5'), ('about 5 or 6', '5'), ('5, 6', '5'), ('5 and 6', '6'),
    ],
    'choices': [(r'\textbf{(D)} 12', '13'), (r'\textbf{(D)} 12', 'A'), (r'\text{(B) }3', '(2,3)')],
    'equations': [
        ('2x=5', '5'), ('7=5', '5'), ('x=7=5', '5'), ('2x=5', 'x=5'), ('7=5', 'x=5'), ('x+1=5', '5'), ('3x-2=5', '5'),
        (r'\sqrt{ab}=6', '6'), ('x+y=7', '7'), ('a+b+c = 14', '14'), (r'\frac{a}{b}=\frac{2}{3}', r'\frac23'),
        ('5=7', '5'), ('x=5', '-5'), ('x=5', 'y=6'), ('2+2=5', '5'), ('5=5x', '5'), ('0x=5', '5'),
    ],
    'lists': [
        ('16,3,1', '16,3,1,1'), ('16,3,1,1', '16,3,1'), ('1,2,2', '1,1,2'), ('w=16, d=3, a=1', 'w=16, d=3, a=1, b=1'),
        ('w=3, d=16, a=1, b=1', 'w=16, d=3, a=1, b=1'), ('x=2, y=1', 'x=1, y=2'), ('2,1', 'x=1, y=2'), ('(2,1)', 'x=1,y=2'),
        ('y=1,x=2', '(x,y)=(1,2)'), ('16, 1, 1, 3', 'w=16, d=3, a=1, b=1'),
    ],
    'subscripts': [
        ('6', r'a_{\text{max}} = 5'), ('x_1', 'x_2'), (r'a_{\text{max}}=4', r'a_{\max}=5'), ('a_n=2n+1', 'a_n=2n'),
        ('x_1+x_2', 'x_1+x_3'), (r'n_{\min}=8', '7'), ('3x=7', '7'), ('x/2=7', '7'), ('x-3=7', '7'), ('x^2=7', '7'),
        ('-x=7', '7'), (r'\frac{x}{3}=7', '7'), ('2x+1=7', '7'), ('8=7', '7'), ('7=8', '7'), ('x=8', '7'), ('1+1=3', '3'),
        (r'\sqrt{4}=3', '3'), ('3=3.5', '3.5'), (r'\pi=3', '3'), ('f(x)=x+1', 'f(x)=x-1'),
    ],
    'sets': [
        (r'[3,\infty)', r'\{x \mid x > 3\}'), ('x<3', r'\{x : x>3\}'), (r'\{x \mid x\ge 3\}', r'\{x \mid x>3\}'),
        (r'\{x\mid x\ne 3\}', r'x\ne 2'), (r'\{n\in\mathbb{Z}: n>3\}', r'\{n\in\mathbb{Z}: n\ge 3\}'),
        (r'(-\infty,1)\cup(1,\infty)', r'\{x \mid x \neq -1\}'), (r'\{x: -2<x<2\}', '[-2,2]'),
        (r'\{x\mid x\ge 0\}', r'\{x\mid x\le 0\}'), (r'\{x \in \mathbb{R} : x^2 = 4\}', r'\{x \in \mathbb{R} \mid x^2=9\}'),
        (r'\emptyset', r'\{0\}'), ('0', r'\{x\mid x>0\}'), ('3', r'\{x\mid x>3\}'), ('3', 'x>3'), ('x=3', 'x>3'),
        ('3', r'x\ge 3'), ('x>3', '3'), (r'x\ne 3', '3'), ('[3,4]', '3'),
    ],
    'both_signs': [
        ('(1,2)', r'(\pm 1, 2)'), (r'(\pm 1,3)', r'(\pm 1,2)'), (r'1+\sqrt2', r'1\pm\sqrt2'), ('0,2', r'0,\pm2'),
        (r'(1,\pm 2)', r'(\pm 1,2)'), (r'\pm 3', '3'), ('2', r'\pm 2'), (r'1+\sqrt3', r'x=1\pm\sqrt3'),
        (r'(\pm 3,2)', '(3,2)'), (r'(\pm3,\pm2)', '(3,2),(-3,-2)'), (r'\pm 2', r'\pm 3'), (r'1\pm\sqrt2', r'2\pm\sqrt2'),
        ('y=x', r'y=\pm x'), (r'\pm\sqrt2+1', r'\pm\sqrt2-1'),
    ],
    'intervals': [
        (r'x\le 1 \text{ or } x>3', r'(-\infty,1)\cup(3,\infty)'), ('1<x<3', '(1,3]'), ('x>2', r'[2,\infty)'),
        (r'x<1 \text{ and } x>3', r'(-\infty,1)\cup(3,\infty)'), ('x<1', r'(-\infty,1)\cup(3,\infty)'), ('(1,3)', '[1,3]'),
        ('x>3 or x<2', r'(-\infty,1)\cup(3,\infty)'), ('x>5', 'x<5'), ('x<1', r'(-\infty,1]'),
        ('x<1 or x>4', r'(-\infty,1)\cup(3,\infty)'), (r'(-\infty,1)', r'(1,\infty)'), ('1<x<2', '2<x<3'),
        (r'1<x<3 \text{ and } 2<x<4', '(1,4)'), ('[0,1]', '[0,1],[2,3]'), ('(0,1)', r'(0,1)\cup(2,3)'), (r'x\ge2', 'x>2'),
        ('(1,2)', '(2,1)'), ('x>3, y<2', 'x>3, y<1'),
    ],
    'qualifiers': [
        (r'f(x)=3x \text{ for all } x', 'f(x)=2x'), (r'n\pi, n\in\mathbb{Z}', r'2n\pi, n\in\mathbb{Z}'),
        (r'f(x)=x \text{ for all } x>0', r'f(x)=x \text{ for all } x<0'),
        (r'3 \text{ if } n \text{ is even}', r'3 \text{ if } n \text{ is odd}'),
        (r'2\pi k+1, k\in\mathbb{Z}', r'2\pi k, k\in\mathbb{Z}'), (r'f(x)=ax, a\in\mathbb{R}', 'f(x)=ax+b'),
        (r'n^2 \text{ for } n\ge 2', 'n^3'), ('5 for x=2', '4'),
    ],
    'latex': [
        (r'\frac2\pi', r'\frac\pi2'), (r'\frac\pi2', r'\frac{\pi}{3}'), (r'\bigg(1,2\bigg)', '(2,1)'),
        (r'\frac1{12}', r'\frac{1}{1}2'), (r'\frac{3}4', '4/3'), (r'\frac{1}{23}', r'\frac123'), (r'\sqrt2', r'\sqrt[3]2'),
        (r'1\frac12', '1/2'),
    ],
    'degrees': [
        (r'45^\circ', r'\frac{\pi}{3}'), (r'\frac{\pi}{4}', r'30^\circ'), ('45', r'\frac{\pi}{4}'), (r'1^\circ', r'2^\circ'),
        (r'\frac{\pi}{4}', '45'), (r'60^\circ', r'\frac{\pi}{6}'), ('60', r'\frac{\pi}{3}'), (r'\cos(60^\circ)', '-0.5'),
        (r'45^\circ', r'45\text{ radians}'), (r'\pi^\circ', r'\pi'),
    ],
    'bound': [
        (r'2k\pi, k\in\mathbb{Z}', r'n\pi'), (r'n\pi+k', r'n\pi+n, n\in\mathbb{Z}'), ('x', r'y, n\in\mathbb{Z}'),
        ('f(t)=2x+1', 'f(x)=2x+1'), ('2m+1', '2k+1'), ('f(t)=t^2', 'f(x)=x^3'), ('m+1', 'n+1'),
        (r'\sum_{k=1}^n k', r'\sum_{k=1}^m k'), (r'k\pi+n, k\in\mathbb{Z}', r'n\pi+k, n\in\mathbb{Z}'),
    ],
    'labels': [
        ('x=1,y=3', 'x=1,y=2'), ('(1,2,3)', '(a,b,c)=(1,3,2)'), ('f(x)=x', 'f(x)=x, f(x)=-x'), ('1,-3,2', 'x_1=1,x_2=-3'),
        ('x=1', 'x=1,y=2'), ('a=1, b=2', 'a=2, b=1'), ('g(n)=n, f(n)=1', 'f(n)=n, g(n)=1'), ('3,4', 'x=4,y=3'),
    ],
}  # fmt: skip


def judge(answer, gold):
    """As the task judges a boxed answer, but in this process and without a deadline."""
    verdict = quick_verdict(answer, [gold])
    return slow_verdict(answer, [gold], boxed=True)[0] if verdict is None else verdict


@pytest.mark.parametrize('kind', EQUAL)
def test_an_equal_answer_is_right(kind):
    assert [(a, g, judge(a, g).name) for a, g in EQUAL[kind] if judge(a, g) != Verdict.CORRECT] == []


@pytest.mark.parametrize('kind', UNEQUAL)
def test_an_unequal_one_is_wrong_and_the_gold_is_not_to_blame(kind):
    judged = [(a, g, judge(a, g)) for a, g in UNEQUAL[kind]]
    assert [row for row in judged if row[2] not in (Verdict.WRONG, Verdict.UNPARSEABLE)] == []


@pytest.mark.parametrize('kind', ['subscripts', 'sets', 'both_signs', 'qualifiers'])
def test_a_gold_of_any_class_can_be_read(kind):
    assert [g for _, g in EQUAL[kind] if judge(r'\frac{x+17}{19y}', g) == Verdict.INFRA_ERROR] == []
